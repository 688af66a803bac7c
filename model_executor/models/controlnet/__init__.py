"""ControlNets: models that steer a denoiser by a further picture, a file for each kind."""
