"""Where tables of FlashInfer are tuned, as their metadata says."""

H200 = {
    "flashinfer_version": "0.7.2.post1",
    "cuda_version": "13.0",
    "cublas_version": "13.1.0",
    "cudnn_version": "91501",
    "cudnn_frontend_version": "1.31.0",
    "cutlass_dsl_version": "nvidia-cutlass-dsl==4.8.0",
    "gpu": "NVIDIA H200",
}
