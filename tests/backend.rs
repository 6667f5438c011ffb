//! Every backend that is here, by itself, against the interpreter.

mod kernels;

#[test]
fn every_case_interprets() {
    for case in kernels::cases() {
        let written = kernels::interpret(&case.kernel, &case.inputs);
        for (values, write) in written.iter().zip(&case.kernel.writes) {
            assert_eq!(values.len(), write.access.shape.numel(), "{}", case.name);
            assert!(values.iter().all(|v| v.is_finite()), "{}: {values:?}", case.name);
        }
    }
}
