//! Reads and writes the ONNX text syntax.
//!
//! `parse` accepts every text that `onnx.parser` accepts, and `print` writes texts that both accept.
//!
//! ```text
//! model    ::= header? graph (training | function)*
//! training ::= '<' ('update_binding' | 'initialization_binding') ':' '[' (string ':' string),* ']' '>' graph
//! header   ::= '<' (key ':' value),* '>'
//! graph    ::= name '(' input,* ')' '=>' '(' value,* ')' ('<' (value | initializer),* '>')? nodes
//! function ::= header? name ('<' (name | attr),* '>')? '(' value,* ')' '=>' '(' value,* ')' ('<' value,* '>')? nodes
//! nodes    ::= '{' node* '}'
//! node     ::= ('[' name ']')? name,* '=' (domain '.')* op (':' overload)? attrs? '(' name,* ')' attrs? placed*
//! placed   ::= '@' string (':' stage)? '[' (name '<' (axis ':' '[' (shards ('of' (number | string))?),* ']'),* '>' devices),* ']'
//! devices  ::= '(' number,* ')' ('[' (number ':' '(' number,* ')'),* ']')?
//! attrs    ::= '<' attr,* '>'
//! attr     ::= name (':' kind)? '=' ('@' name | item | '[' item,* ']')
//! item     ::= number | string | tensor | type | graph
//! tensor   ::= type name? '='? data
//! value    ::= type? name
//! input    ::= value ('=' data)?
//! initializer ::= value '=' data | 'sparse_tensor' '(' type ')' name '=' '{' '}'
//! data     ::= '{' (number | string),* '}' | '[' (string ':' string),* ']'
//! type     ::= elem ('[' dim,* ']')? | ('seq' | 'map' | ...) '(' type,* ')'
//! dim      ::= '?' | name | number
//! name     ::= identifier | string
//! ```
//! `float` is a scalar. `float[]` has an unknown rank, which a tensor cannot have. Floats of 16 bits and fewer are written
//! as their bits, external data as `["location": "w.bin", ...]`. In a string, a character after `\` stands for itself.
//! `#` starts a comment.
//!
//! This syntax extends that of `onnx.parser`, so that every model can be printed and read back. Any name, domain or
//! operator may be quoted. A training step has bindings before its algorithm, and before its initialization if it has one. A sparse
//! initializer is one of zeros. Lists of tensors, graphs and types keep their elements. A header
//! has `configuration: [string ':' number ('(' string,* ')')?,*]`, for which nodes say how they are split, on which devices. `undefined` is an element type. Every
//! list may be empty. One rule is stricter: a tensor has as many values as its shape needs, each in the range of its type.

use super::proto::{AttributeType, DataType};

mod parse;
mod print;
mod scan;

pub use parse::parse;
pub use print::print;

/// The name of each attribute type, the type, and the type of lists of it (whose name has an `s` more).
const ATTRIBUTE_TYPES: [(&str, AttributeType, AttributeType); 7] = [
    ("float", AttributeType::Float, AttributeType::Floats),
    ("int", AttributeType::Int, AttributeType::Ints),
    ("string", AttributeType::String, AttributeType::Strings),
    ("tensor", AttributeType::Tensor, AttributeType::Tensors),
    ("graph", AttributeType::Graph, AttributeType::Graphs),
    ("sparse_tensor", AttributeType::SparseTensor, AttributeType::SparseTensors),
    ("type_proto", AttributeType::TypeProto, AttributeType::TypeProtos),
];

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn is_special_float(word: &str) -> bool {
    ["inf", "infinity", "nan"].iter().any(|special| word.eq_ignore_ascii_case(special))
}

/// True if this word starts a type. `undefined` is not among them: it is a name, unless another name follows.
fn is_type_word(word: &str) -> bool {
    matches!(word, "seq" | "map" | "optional" | "sparse_tensor" | "opaque")
        || DataType::from_name(word).is_some_and(|kind| kind != DataType::Undefined)
}

fn attribute_type_name(kind: AttributeType) -> String {
    let of = |&(name, one, many): &(&str, _, _)| match kind {
        kind if kind == one => Some(name.to_owned()),
        kind if kind == many => Some(format!("{name}s")),
        _ => None,
    };
    ATTRIBUTE_TYPES.iter().find_map(of).unwrap_or_else(|| "undefined".into())
}
