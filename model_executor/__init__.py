"""The worker process and everything that runs on a device: models, kernels, samplers, cached pages."""

import logging

# diffusers imports torchao if it is installed, which then warns that it has no kernels for this machine's processors.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_name).setLevel(logging.ERROR)
