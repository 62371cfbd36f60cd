"""A predicted or recorded training step as a page of HTML, as a trace for Perfetto, or as a picture for papers."""

from sherd.tools.report.exports import perfetto, picture
from sherd.tools.report.page import page

__all__ = ["page", "perfetto", "picture"]
