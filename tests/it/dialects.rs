//! The WGSL of every row and of every kernel case in the languages of other drivers: MSL, HLSL and SPIR-V, as naga writes them for wgpu.

use crate::{kernels, ops, samples};
use naga::back::{hlsl, msl, spv};
use naga::proc::BoundsCheckPolicies;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::render::{Bindings, Dialect, render};
use plimsoll::internals::kernel::{Kernel, schedule};
use plimsoll::internals::target::Target;
use std::collections::HashMap;

/// The text of a kernel, if it has one.
fn text(kernel: &Kernel, target: &Target) -> Option<String> {
    // Loops launch other kernels, and have no text of their own.
    let Schedule::Text(_) = kernel.schedule else { return None };
    let source = render(kernel, target, &Bindings::distinct(kernel), Dialect::Wgsl).expect("it is rendered");
    (source.groups != [0; 3]).then_some(source.text)
}

/// Translates a text to each language; their names, with what went wrong.
fn translated(text: &str) -> Result<(), String> {
    let module = naga::front::wgsl::parse_str(text).map_err(|e| format!("WGSL: {}", e.emit_to_string(text)))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::SUBGROUP).validate(&module);
    let info = info.map_err(|e| format!("WGSL: {}", e.emit_to_string(text)))?;
    let languages: [(&str, fn(&naga::Module, &ModuleInfo) -> Result<(), String>); 3] =
        [("MSL", to_msl), ("HLSL", to_hlsl), ("SPIR-V", to_spirv)];
    languages.iter().try_for_each(|(name, to)| to(&module, &info).map_err(|error| format!("{name}: {error}")))
}

/// Entry points have errors of their own in some languages.
fn whole<E: ToString>(entry_points: Vec<Result<String, E>>) -> Result<(), String> {
    entry_points.into_iter().try_for_each(|entry| entry.map(drop).map_err(|error| error.to_string()))
}

fn to_msl(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let options = msl::Options { lang_version: (2, 1), ..msl::Options::default() };
    let written = msl::write_string(module, info, &options, &msl::PipelineOptions::default());
    whole(written.map_err(|e| e.to_string())?.1.entry_point_names)
}

fn to_hlsl(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let (mut text, options, pipeline) = (String::new(), hlsl::Options::default(), hlsl::PipelineOptions::default());
    let written = hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None);
    whole(written.map_err(|e| e.to_string())?.entry_point_names)
}

fn to_spirv(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let options = spv::Options {
        lang_version: (1, 3),
        bounds_check_policies: BoundsCheckPolicies::default(),
        ..spv::Options::default()
    };
    spv::write_vec(module, info, &options, None).map(drop).map_err(|e| e.to_string())
}

#[test]
fn every_row_is_written_in_every_language() {
    let target = Target::wgpu();
    let mut texts = HashMap::new();
    for sample in samples::samples() {
        let plan = ops::planned(&sample, &target).unwrap_or_else(|e| panic!("{}: {e}", sample.op)).0;
        let kernels = plan.programs.iter().flat_map(|program| &program.kernels);
        texts.extend(kernels.filter_map(|kernel| Some((text(kernel, &target)?, sample.op.to_owned()))));
    }
    let of_rows = texts.len();
    let with_subgroups = Target { subgroups: true, ..Target::wgpu() };
    for target in [target, with_subgroups] {
        for case in kernels::cases() {
            let kernel = schedule::scheduled(&case.kernel, &target).unwrap_or_else(|e| panic!("{}: {e}", case.name));
            texts.extend(text(&kernel, &target).map(|text| (text, case.name.to_string())));
        }
    }
    for case in [kernels::variants::products(), kernels::many_patches()].concat() {
        for schedule in schedule::candidates(&case.kernel, &Target::wgpu_desktop(), &|_| true) {
            let kernel = Kernel { schedule, ..case.kernel.clone() };
            texts.extend(text(&kernel, &Target::wgpu_desktop()).map(|text| (text, case.name.to_string())));
        }
    }
    eprintln!("{of_rows} texts of rows, {} with those of cases", texts.len());
    assert!(of_rows > 100, "{of_rows}");
    let failure = |(text, name): (&String, &String)| Some(format!("{name}: {}", translated(text).err()?));
    let failures: Vec<String> = texts.iter().filter_map(failure).collect();
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}
