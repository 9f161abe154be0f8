"""The pictures of the guides: ``python -m docs.pictures --write`` draws each from what it shows.

Each module has ``draw``, which returns the SVG file of its name. A test fails while a file differs from that.
"""
