# Sourced by tests/run.sh --engines, in an active environment: puts DeepSpeed on PYTHONPATH.
#
#   source tools/deepspeed.sh
#
# It is installed into .deepspeed, beside .venv and not in it: Accelerate and transformers import it wherever they find it.
# torch stays as it is. Where DeepSpeed cannot be had the script says so, and its tests are skipped.

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_folder="$_root/.deepspeed"
_stamp="$_folder/.seqreg-$(python -V | cat - "$_root/constraints.txt" "${BASH_SOURCE[0]}" | cksum | tr ' ' '-')"
if [ ! -e "$_stamp" ]; then
    echo "Installing DeepSpeed into $_folder (once)" >&2
    rm -rf "$_folder"
    if DS_BUILD_OPS=0 python -m pip install --quiet --disable-pip-version-check --no-deps --target "$_folder" \
        -c "$_root/constraints.txt" deepspeed==0.19.8 einops hjson msgpack ninja py-cpuinfo; then
        touch "$_stamp"
    else
        rm -rf "$_folder"
        echo "DeepSpeed cannot be had here: its tests are skipped" >&2
    fi
fi
export PYTHONPATH="$_folder${PYTHONPATH:+:$PYTHONPATH}" PATH="$_folder/bin:$PATH"
