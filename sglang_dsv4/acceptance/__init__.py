"""Checks over HTTP whether a server computes DeepSeek-V4, for whoever serves released weights (docs/acceptance.md).

Standard library only, so that the checks run on any machine that reaches the server.
"""
