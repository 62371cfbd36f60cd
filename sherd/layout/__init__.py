"""WHERE each element lies: extents, placements, plans, packings. Integers only, no tensors and no communication."""
