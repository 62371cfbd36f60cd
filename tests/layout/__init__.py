"""Every element is where the packing says, exactly once."""
