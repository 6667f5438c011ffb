//! Inputs of an operator.

/// How often an input may be given, and its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arity {
    /// Exactly once.
    One,
    /// Once or not at all.
    Optional,
    /// Any number of times, at least once; last in the list.
    Variadic,
    /// A constant that shapes the computation. It becomes the attribute of the input's name, and may be omitted.
    Shaping,
    /// Like `Shaping` if it is a constant; any other value is ignored.
    Hint,
}

/// An input of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// ONNX's name for it.
    pub name: &'static str,
    /// How often it may be given.
    pub arity: Arity,
}

impl Input {
    /// True if the input becomes an attribute; data inputs stay values.
    pub fn shapes(&self) -> bool {
        matches!(self.arity, Arity::Shaping | Arity::Hint)
    }
}

/// The inputs of a row by ONNX's names. `x` is required, `x?` may be omitted, and `x*` is repeated. `x=` becomes an attribute;
/// `x~` is a hint.
macro_rules! inputs {
    (@ [$($found:expr,)*]) => { &[$($found),*] };
    (@ $found:tt $name:ident ? $($rest:tt)*) => { inputs!(@ Optional $found $name $($rest)*) };
    (@ $found:tt $name:ident * $($rest:tt)*) => { inputs!(@ Variadic $found $name $($rest)*) };
    (@ $found:tt $name:ident = $($rest:tt)*) => { inputs!(@ Shaping $found $name $($rest)*) };
    (@ $found:tt $name:ident ~ $($rest:tt)*) => { inputs!(@ Hint $found $name $($rest)*) };
    (@ $arity:ident [$($found:tt)*] $name:ident $($rest:tt)*) => {
        inputs!(@ [$($found)* $crate::op::Input { name: stringify!($name), arity: $crate::op::Arity::$arity },] $($rest)*)
    };
    (@ $found:tt $name:ident $($rest:tt)*) => { inputs!(@ One $found $name $($rest)*) };
    ($($inputs:tt)*) => { inputs!(@ [] $($inputs)*) };
}

/// Names of attributes.
macro_rules! names {
    ($($name:ident)*) => { &[$(stringify!($name)),*] };
}

pub(crate) use {inputs, names};
