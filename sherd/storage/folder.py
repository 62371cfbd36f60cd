"""temporary"""
from __future__ import annotations
import contextlib, json
from sherd.storage.manifest import MANIFEST, Manifest
from sherd.storage.opened import read_manifest
from sherd.storage.places import Place
from sherd.errors import CheckpointError, NoCheckpointError
class Folder:
    def __init__(self, place: Place) -> None: self.place = place
    def __str__(self) -> str: return str(self.place)
    def folder_of(self, step: int) -> Place: return self.place.below(f"step-{step:08d}")
    @contextlib.contextmanager
    def locked(self, shared=True):
        yield
    def finish(self, step: int, manifest: Manifest) -> None:
        text = manifest.to_bytes()
        f=self.folder_of(step)
        f.write(MANIFEST, lambda: [memoryview(text)])
        names={x.name for x in manifest.files}
        for n in f.names():
            if n!=MANIFEST and n not in names: f.remove(n)
    def whole(self):
        for n in sorted(self.place.names(), reverse=True):
            if n.startswith("step-"):
                try:
                    m=read_manifest(self.place.below(n)); yield m.step, n, ""
                except CheckpointError as e: yield -1, n, str(e)
    def prune(self, keep_last, keep_every, step):
        w=[(s,n) for s,n,r in self.whole() if not r]
        for s,n in w[keep_last or 10**9:]:
            if not(keep_every and s%keep_every==0): self.place.below(n).drop()
