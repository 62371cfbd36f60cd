"""WHERE each element lives: extents, placements, plans, packings. Integers only, no tensors and no communication."""
