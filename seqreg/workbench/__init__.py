"""From a recipe to a trained, scored model: text -> config -> data -> scores -> run."""
