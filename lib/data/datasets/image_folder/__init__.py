"""A folder of images in the layout of ImageNet."""
