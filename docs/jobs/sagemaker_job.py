"""SageMaker, two instances with four GPUs each: python sagemaker_job.py"""

from sagemaker.pytorch import PyTorch

estimator = PyTorch(
    entry_point="train.py",
    source_dir=".",  # with a requirements.txt
    role="arn:aws:iam::123456789012:role/SageMakerRole",
    framework_version="2.6.0",
    py_version="py312",
    instance_type="ml.g5.12xlarge",
    instance_count=2,
    # SageMaker starts torchrun on each instance, with a process for each GPU.
    distribution={"torch_distributed": {"enabled": True}},
)
estimator.fit({"training": "s3://bucket/data"})
