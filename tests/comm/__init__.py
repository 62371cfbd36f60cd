"""Do meshes, buffers, collectives and streams do what the engine relies on?"""
