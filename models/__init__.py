"""Models, one folder each with its Kconfig: tensors in, tensors out.

A model knows no configuration, device, file or task but its own Options. Imported by train.
"""
