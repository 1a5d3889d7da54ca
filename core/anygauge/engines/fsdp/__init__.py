"""Train engine of torch FSDP2 around the models of transformers."""
