"""The pages of docs/reference/ that repeat the code: Python, HTTP, flags and limits.

Their prose is written by hand. The parts that the code determines stand between two comments,

    <!--generated:NAME-->
    <!--end-->

and `python -m scripts.api_reference` writes those parts.
"""
