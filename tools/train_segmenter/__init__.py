"""Trains the segmenter that is shipped beside the embedded model. Not part of the wheel."""
