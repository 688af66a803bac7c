"""The worker process and everything that runs on a device: models, kernels, samplers, cached pages."""

import logging

# diffusers imports torchao wherever it is installed, which then warns of kernels for processors that are not there.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_name).setLevel(logging.ERROR)
