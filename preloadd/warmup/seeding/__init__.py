"""What one daemon asks of another that is warm already, and what it believes of the answer.

The wire is that of vLLM 0.33: one request, one answer, each a length and JSON. Nothing in here
opens a connection; `rank.seeding` does.
"""
