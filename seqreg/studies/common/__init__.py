"""What the studies share: trained models, findings, figures."""
