"""Does what one model saved load into another, whatever the layouts and numbers of ranks?"""
