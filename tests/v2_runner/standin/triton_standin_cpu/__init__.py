"""A Triton backend named ``cpu`` that compiles nothing: with it vLLM's V2 model runner runs in Triton's interpreter.

Found by Triton through the entry point beside it wherever this folder is on ``PYTHONPATH``. Only for tests.
"""
