"""Steps, host time and memory on an accelerator: `python -m bench --device cuda`."""
