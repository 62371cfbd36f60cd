"""The first ten minutes on a machine's GPUs: `python -m bench.gpus`, which `sherd doctor --gpus` and `make gpu` start.

torch and sherd are all that it needs. It is a program of the bench, and not a part of sherd, because torch's own FSDP
is measured in it, which sherd does not import.
"""
