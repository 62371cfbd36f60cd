"""The means by which bytes travel: meshes and groups, streams, buffers, transports. No modules, no schedule."""
