"""Does it also hold where streams, memory pools and launches are real? On one CUDA device, or on the simulated one."""
