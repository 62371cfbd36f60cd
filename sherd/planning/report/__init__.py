"""A training step, predicted or recorded, as a page of HTML, as a trace for Perfetto, and as a picture for papers."""

from sherd.planning.report.exports import perfetto, picture
from sherd.planning.report.page import page

__all__ = ["page", "perfetto", "picture"]
