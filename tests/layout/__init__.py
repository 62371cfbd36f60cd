"""Is every element where the packing says, exactly once?"""
