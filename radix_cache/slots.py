"""Bookkeeping of the prefix cache that knows nothing of SGLang. Empty while prefix reuse is off."""
