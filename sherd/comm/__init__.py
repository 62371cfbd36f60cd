"""The means by which bytes travel: meshes and groups, streams and handoffs, buffers, transports. No modules, no
schedule."""
