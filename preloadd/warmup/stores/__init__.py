"""Stores that several hosts share: asked for what is wanted here, given what was made here.

`api` is what a store is, `chain` asks several in their order and survives them, `opening` makes
them of their names. A store is never needed: whatever is wrong with one, it is passed over.
"""
