"""Is what was reported as saved read again as it was written, whatever happens to the files and to who writes them?"""
