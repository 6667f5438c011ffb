//! The integration tests: one crate, a module for each subject. `cargo test --test it passes::` runs those of one.
//!
//! `tests/alloc.rs` counts allocations, and needs a process of its own.
//!
//! Long searches run in part unless `PLIMSOLL_LONG=1` is set; stderr then names what was left out. `BLESS=1` writes goldens anew.

// Shared by several modules: backends and comparisons; graph files; kernels with their meaning; a call of every
// operator.
mod common;
mod graphs;
mod kernels;
mod samples;

// Operators: every row of the table.
mod composed;
mod loops;
mod lowering;
mod ops;
mod rows;

// Files and graphs.
mod annotations;
mod control;
mod counted;
mod edges;
mod fuzz;
mod hostile;
mod offload;
mod onnx;
mod proto;
mod syntax;

// Passes.
mod attention;
mod autodiff;
mod checkpoint;
mod chunk;
mod half;
mod layout;
mod optimizers;
mod packed;
mod passes;
mod precision;
mod prologue;
mod random;
mod recompute;
mod rotary;

// Plans: lowering, order, placement, the checker, limits.
mod choices;
mod grow;
mod joined;
mod limit;
mod memory;
mod model;
mod order;
mod place;
mod plan;
mod python;
mod range;
mod ranks;
mod target;
#[cfg(target_os = "linux")]
mod whole;

// Kernels and backends.
mod backend;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "wgpu")]
mod dialects;
#[cfg(target_os = "linux")]
mod emulate;
mod lent;
mod library;
#[cfg(feature = "cuda")]
mod nvrtc;
mod processors;
mod render;
mod templates;
mod tune;

// The library and the program from outside.
mod allocators;
mod bounds;
mod census;
mod cli;
mod data;
mod decoder;
mod eager;
mod ffi;
mod fill;
mod flags;
mod forks;
mod from_plan;
mod front;
mod given;
mod golden;
mod narrow;
mod outside;
mod pairs;
mod picture;
mod prefetch;
mod programs;
mod report;
mod saved;
mod scenarios;
mod session;
mod state;
mod symbolic;
mod train;
mod train_limit;
mod train_plan;
mod train_refused;
mod training;
mod web;

// The project's rules about itself.
mod tidy;
