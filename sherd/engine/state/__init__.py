"""The state that one rank holds: parameters in groups, their buffers, and the tensors that the optimizer owns."""
