"""The API reference: what docs/api-python.md and docs/api-http.md tell from the code.

Prose stands in these pages as it is written. What the code says is between two comments,

    <!-- generated: NAME -->
    <!-- end -->

and `python -m scripts.api_reference` writes it anew.
"""
