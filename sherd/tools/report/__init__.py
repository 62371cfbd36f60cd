"""A training step, predicted or recorded, as a page of HTML, as a trace for Perfetto, and as a picture for papers."""

from sherd.tools.report.exports import perfetto, picture
from sherd.tools.report.page import page

__all__ = ["page", "perfetto", "picture"]
