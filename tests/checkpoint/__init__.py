"""A checkpoint of one model loads into another, whatever the layouts and numbers of ranks."""
