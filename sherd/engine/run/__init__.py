"""When it happens: units, the runtime of a model, and the hooks that call them."""
