"""Do the small parts of the engine hold, each by itself?"""
