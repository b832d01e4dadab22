"""Mooncake's name for a folder on PYTHONPATH, where a test has no Mooncake; `engine` is all that SGLang asks for."""
