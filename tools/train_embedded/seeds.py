"""The data splits, as the first seeds of ranges that do not overlap: a scene is a pure function of its seed."""

CLASSIFIER = 4_000_000  # renders that the pattern classifier is fitted on
TUNING = 5_000_000  # held-out scenes for development
VAE_HELD_OUT = 6_000_000  # held-out scenes for the autoencoder's PSNR
EDGES_TEST = 8_000_000  # held-out scenes for the edge ControlNet's published figures
TEST = 9_000_000  # held-out scenes for the published figures; never used for tuning
TEST_BOXES = 9_500_000  # the same, for box masks and the shape score
TEST_WHOLE_BOXES = 9_700_000  # the same, for boxes that contain the whole garment and both hands
SEGMENTER_TEST = 9_900_000  # held-out scenes for the segmenter's published figures
VAE_TRAIN = 10_000_000
DENOISER_TRAIN = 20_000_000
BOXES_TRAIN = 30_000_000
DECODER_TRAIN = 60_000_000
REFINE_TRAIN = 50_000_000
EXAMPLES = 40_000_000
SEGMENTER_TRAIN = 70_000_000
EDGES_TRAIN = 80_000_000

TEST_CASES = 200
