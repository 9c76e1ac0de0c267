// Stands in for the header of this name in NVIDIA's compiler, which the wheels of PyTorch do not bring.
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __location__(a)
