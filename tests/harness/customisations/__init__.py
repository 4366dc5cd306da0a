"""
What users change about a trainer, for the cases of `--customised`: methods, objectives, callbacks, the model, and what
stands around the trainer. The code stands in for a user's: nothing of the package takes it for its own.
"""
