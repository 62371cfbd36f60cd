"""WHERE each element lives: extents, placements, packings. Integers only; no tensors, no ranks talking."""
