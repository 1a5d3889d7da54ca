"""LoRA, as far as it does not depend on the train engine: layers, files, roles, checkpoints' base."""
