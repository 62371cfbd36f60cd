"""WITH WHAT bytes travel: meshes and groups, streams and handoffs, buffers, collectives. Knows no module and no
schedule."""
