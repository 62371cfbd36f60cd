"""WHERE each element is: extents, placements, plans, packings. Integers only, no tensors and no communication."""
