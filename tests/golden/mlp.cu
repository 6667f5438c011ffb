// kernel 0, matmul: hidden
// {"mat_mul":{"m":100,"n":8,"k":784,"batch":1,"a":{"slot":1,"dtype":"f32","offset":0,"transposed":false,"leading":100,"stride":0},"b":{"slot":0,"dtype":"f32","offset":0,"transposed":false,"leading":784,"stride":0},"d":{"slot":3,"dtype":"f32","offset":0,"transposed":false,"leading":100,"stride":0},"alpha":1.0,"bias":{"slot":2,"offset":0},"activation":"relu","tf32":false}}

// kernel 1, matmul: scores
// {"mat_mul":{"m":10,"n":8,"k":100,"batch":1,"a":{"slot":1,"dtype":"f32","offset":0,"transposed":false,"leading":10,"stride":0},"b":{"slot":0,"dtype":"f32","offset":0,"transposed":false,"leading":100,"stride":0},"d":{"slot":3,"dtype":"f32","offset":0,"transposed":false,"leading":10,"stride":0},"alpha":1.0,"bias":{"slot":2,"offset":0},"activation":"none","tf32":false}}

