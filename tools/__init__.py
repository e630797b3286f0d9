"""Make the documentation: hooks of its site, and the pages that are generated. Not part of the package."""
