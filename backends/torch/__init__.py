"""The torch world: a Hugging Face target and drafter, each in its own process on its own device.

It is the oracle for correctness and the embedded default: short and clear rather than fast. Importing this package
loads neither torch nor transformers, so a worker process can pin itself to its core before they start threads.
"""
